"""The dashboard: pages over the journal, and what-if. It reads, computes and renders; it runs no code of a user's."""
