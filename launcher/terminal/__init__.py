"""What a person sees on the terminal: console.py, units.py, and the line of doing.py."""
