"""One HTML file for an answer: the verdict, charts, tables and data, with nothing fetched from anywhere.

`assets` and `figure` are what a server of pages needs as well: the scripts and styles as files, and a chart's HTML.
"""
