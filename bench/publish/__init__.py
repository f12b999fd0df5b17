"""Generates the tables and pictures of the documentation from the results in `bench/results`.

`results.py` reads results, `pages.py` replaces the blocks between the markers of a page, `blocks.py` defines the
content of each block, and `plots.py` draws the pictures. Only `plots.py` requires matplotlib. Start reading at
`pages.py`.
"""
