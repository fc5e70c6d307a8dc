"""Every plugin on this machine's devices, right and fast: cases in processes of their own, and a report.

``python -m device_runs`` (with ``tests/shared`` on ``PYTHONPATH``) runs what this machine can: on one CUDA device,
cases of one rank with NCCL, and cases of several ranks that share it over a staged backend; on two or more, those of
several ranks with NCCL. Without one it says that nothing was measured. ``tests/together/devices`` runs the same cases
on the simulated accelerator, where times mean nothing.

Needs torch, transformers, pytest and our distributions; nothing else.
"""
