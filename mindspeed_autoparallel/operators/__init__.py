"""See the map in mindspeed_autoparallel/__init__.py."""
