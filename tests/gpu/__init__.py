"""What a real device shows, and nothing else does.

one_device.py   the command
test_one_device.py   how it judges
"""
