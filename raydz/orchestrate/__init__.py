"""Ray hosts the ranks: `fit.fit`, its workers, what they report. Layer 8, the only folder that imports ray. README.md.

Nothing is imported here: a worker that only supervises imports neither torch nor the training loop.
"""
