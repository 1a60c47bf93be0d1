"""What was spent, read from the store and told to people and to other programs.

days          which days are asked for
stretches     many days in pieces
tenants       the orgs and apps by name, and how each org counts
counted       counters as they stand in the store, exact as of the last flush
attribution   from an org's own counter and its apps' counters to who spent what, each call once
query         puts these together into a report
totals        rows of a report, by org, app, label or day
money         how money is written
letters       what a terminal may be given, and how wide it is there
table         for a terminal
records       JSON and CSV
focus         the FinOps Open Cost and Usage Specification (FOCUS)
"""
