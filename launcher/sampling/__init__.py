"""The next token's logits by ranks in the layout of a run, where one process is too small.

window.py   read this first: the recipe of a forward over a window of tokens, and what it reports
ranks.py    the ranks that run its evaluation plan, token by token
"""
