"""Configuration files and launch scripts of trainers: meaning, limits and edits.

Nothing here imports torch or a trainer; PyYAML is imported when a file is read.
"""
