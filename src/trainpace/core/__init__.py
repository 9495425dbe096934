"""Records, units, errors, safe reading of users' files, statistics and facts about the host.

Import its modules by name: `from trainpace.core.records import Record`.
"""
