"""Where state lives when the device is too small: host memory and NVMe, with what moves it. Layer 3.

`memory` gives out host buffers, `tiers` is what the update sees of them; README.md says how the parts meet.
"""
