"""What lies at a URL, such as s3://bucket/runs/gpt, by fsspec.

object_store.py  a folder of objects: put, get, list and remove, tried again; read this first
url_cache.py     files of URLs on the local disk, bounded
ranged_file.py   objects read by ranges, in blocks that the local disk keeps, bounded
"""
