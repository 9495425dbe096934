"""The dashboard: web pages about the journal, and the what-if page.

It reads, computes and renders. It never runs user code.
"""
