"""Patch sheets: one file per patched Megatron module, named like it. No torch at module level."""

if __name__ != "mindspeed_autoparallel.patches":
    raise ImportError(
        f"this package is mindspeed_autoparallel.patches, imported here as {__name__!r}: "
        "import mindspeed_autoparallel.patches instead, and take the repository's root off sys.path if it is there"
    )
