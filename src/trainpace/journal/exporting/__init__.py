"""Runs exported to other experiment trackers, under the names that `journal.importing` reads."""
