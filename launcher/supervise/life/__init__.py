"""The life of a run: no process, no file, no clock.

machine.py           read this first: (state, event) -> (state, instructions)
run_state.py next_round.py   what it holds; what comes after a round
events.py instructions.py   what happens to a run; what the machine asks for
halts.py verdicts.py   its parts: all ranks rest after the same step; whom to blame, how many
                     restarts there may be
"""
