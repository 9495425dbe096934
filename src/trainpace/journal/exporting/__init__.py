"""Runs of the journal into other experiment trackers, under the names that `journal.importing` reads back."""
