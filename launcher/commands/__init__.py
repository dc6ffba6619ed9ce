"""What a command does, one a file: resume, export, verify (beside plain_loop.py), calibrate."""
