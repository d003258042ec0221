"""Trackers of experiments (TensorBoard, W&B, MLflow, trackio, one's own), each in a process of its own.

A process and not a thread: these libraries register exit hooks and start threads that wait for a network, hold the interpreter's lock
while they are imported, and install signal handlers. In another process nothing of that reaches the training, and one that hangs can
be ended.

The training appends records to a file, which is never full as a pipe is, and each process follows that file at its own pace.

    trackers.py   `Trackers`: what a run writes to
    handle.py     one tracker as the training sees it: its process, and its one warning
    process.py    one tracker's process
    tracker.py    what a tracker is; the others, a file each, open one
"""
