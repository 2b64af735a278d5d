"""Reference tables of the documentation, written from the code that they describe.

``python -m scripts.doc_tables`` rewrites them, ``--check`` says which are stale. A module per kind
of table; `pages` says which page shows which.
"""
