"""Which units stay in host memory when most live on a disk. Pure arithmetic. Layer 3.

Above: `nvme.py`. README.md, "NVMe", says why a fixed choice saves as much as any cache can.
"""

from __future__ import annotations

from collections.abc import Sequence


def choose_residents(sizes: Sequence[int], cache_bytes: int, num_slots: int, room_bytes: int) -> set[int]:
    """Positions of units that stay, spread evenly so that disk and processor take turns all along a step.

    Args:
        sizes: bytes of the units.
        cache_bytes: most that those which stay may hold.
        num_slots: buffers for the others, each as large as the largest of them.
        room_bytes: most that both may hold together.
    """
    if sum(sizes) <= min(cache_bytes, room_bytes):
        return set(range(len(sizes)))
    nothing = {index for index, size in enumerate(sizes) if size == 0}
    left = min(cache_bytes, room_bytes - num_slots * max(sizes, default=0))
    total, due = sum(sizes), 0.0
    stay, later = set(nothing), []
    share = max(left, 0) / total
    for index, size in enumerate(sizes):
        due += size * share
        if 0 < size <= min(due, left):
            stay.add(index)
            due -= size
            left -= size
        else:
            later.append(index)
    for index in later:
        if 0 < sizes[index] <= left:
            stay.add(index)
            left -= sizes[index]
    return stay
