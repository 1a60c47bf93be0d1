"""`price-keeper doctor`: checks everything that a role needs on this machine, without changing anything.

Start with `check_list`. A check is a name and a function from the `DoctorContext` to one `Finding`; each `*_checks`
module has those of one subject, and `doctor_checks` runs them.
May import: every package but cli.
"""
