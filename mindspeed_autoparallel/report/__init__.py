"""Reports of a plan: text table, self-contained HTML page, trace of the simulated step. Data and drawing are
separate."""

from mindspeed_autoparallel.report.data import report_data
from mindspeed_autoparallel.report.page import render_page
from mindspeed_autoparallel.report.replay import chrome_trace
from mindspeed_autoparallel.report.table import render_table

__all__ = ["chrome_trace", "render_page", "render_table", "report_data"]
