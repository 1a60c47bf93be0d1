"""What `price-keeper doctor` looks at: all that a sidecar needs on this machine. Nothing here changes anything.

`table` lists the checks; each other file has those of one group. A check is a name and a function that looks at the
patient and tells one finding.
"""
