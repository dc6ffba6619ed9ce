"""Text from a model that predicts the next token, on one process.

A module and a codec enter; pieces of text leave, as they are made.

generate.py          read this first: tokens one by one, each drawn from the logits of those before
text_model.py        the logits of the next token, of any model that has them
kept_keys.py         forwards of GPT and Llama over the newest tokens alone
prompts.py           many prompts, from a file, and what is written after each
codec.py             text <-> ids: bytes, or a tokenizer
"""
