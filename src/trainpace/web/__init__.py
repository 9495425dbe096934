"""The dashboard: pages over the journal, and what-if. Reads, computes, renders; it runs no user's code and writes no user's file."""
