"""The concurrent core: the lock and the gate. Nothing in here imports torch, so that it can be model-checked."""
