"""The zone data come from the locked package, as in every command: the host's own may be older."""

import zoneinfo

zoneinfo.reset_tzpath(to=())
