"""What a DataLoader costs, alone: workers, settings, transforms."""
