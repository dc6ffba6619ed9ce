"""Text as token ids: made once by a tokenizer, kept by content, mapped into memory.

tokenizer.py   a folder or a tokenizer.json -> a fast tokenizer, and the digest of its files
special_tokens.py   a template's are ids, and letters of them in a message stay letters
documents.py   documents as ids, one after the other: found in the cache, or written to it
find_files.py   a folder -> its visible files
plain_text.py   text files -> documents
row_files.py   a jsonl, Parquet or CSV file -> rows with their places, text as it stands there
row_source.py   rows of files, of a split of them, and of saved Hugging Face data sets
answers.py   rows -> documents of which answers alone are trained on
packed.py   several documents in a sample
chat.py   conversations and instructions as such documents
text_rows.py   a field of rows as plain text
train_tokenizer.py   text files -> a folder of a tokenizer
"""
