"""Draws the tables and pictures of the documentation from the results in `bench/results`.

`results.py` reads them, `pages.py` puts blocks between the markers of a page, `blocks.py` says what each block shows,
and `plots.py` draws the pictures. Only `plots.py` needs matplotlib. Start reading at `pages.py`.
"""
