"""Verdict, why, next: from a recorded training run, where its time goes and what is worth changing."""

from trainpace.diagnose.diagnosis import Advice, Diagnosis, Proof, Share, diagnose

__all__ = ["Advice", "Diagnosis", "Proof", "Share", "diagnose"]
