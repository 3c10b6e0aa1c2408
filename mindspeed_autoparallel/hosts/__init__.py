"""Configuration files and launch scripts of trainers: meaning, limits and edits.

This package imports neither torch nor a trainer; it imports PyYAML to read a file.
"""
