"""``python -m mindspeed_autoparallel`` is the command ``mindspeed-autoparallel``."""

import sys

from mindspeed_autoparallel.cli.main import main

sys.exit(main())
