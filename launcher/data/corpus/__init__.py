"""Text as token ids: made once by a tokenizer, kept by content, mapped into memory.

tokens.py   a stream of ids, cut into samples; such a stream from a file of ids, or from a URL
text.py   such a stream, from text
masked.py   hidden ids, to be predicted from the rest
tokenizer.py   a folder or a tokenizer.json -> a fast tokenizer, and the digest of its files
special_tokens.py   special tokens of a template become ids; the same characters in a user's
    message stay text
documents.py   documents as ids, one after the other: found in the cache, or written to it
plain_text.py   text files, found in a folder -> documents
row_source.py   rows of files, of a split of them, and of saved Hugging Face data sets
answers.py   rows -> documents of which answers alone are trained on
packed.py   several documents in a sample; engine/ops/nn/document_op.py lets none see another
chat.py   conversations and instructions as such documents
preferences.py   two answers to a prompt
text_rows.py   a field of rows as plain text
parquet_rows.py   columns of numbers, by row groups
"""
