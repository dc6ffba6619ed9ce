"""What started this process: Slurm, torchrun, Kubernetes …, and what follows for the run's hosts.

platform.py   pure: ROWS of variables -> the platform, and this process's seat in the run
siblings.py   several processes of a host: one launches, the others leave with its status
"""
