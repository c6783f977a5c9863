"""ALERTS: every reason for which Iterscope calls somebody, in groups.

Owns their order and their number; alert_files.py writes them, docs/alerts.md is made from them,
tests prove each. An alert that is not here does not exist. Each has a page of its name in
docs/runbooks/.
"""

from grafana.alert_spec import Alert
from grafana.alerts_record import RECORD
from grafana.alerts_scheduling import SCHEDULING
from grafana.alerts_serving import SERVING

GROUPS = (*SERVING, *SCHEDULING, *RECORD)
ALERTS: tuple[Alert, ...] = tuple(alert for group in GROUPS for alert in group.alerts)
