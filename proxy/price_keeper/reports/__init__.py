"""What was spent, read from the counters in the store: by org, app, label and day.

    spend_report      build a report. START HERE.
    report_period     the days that it covers (pure)
    attribution       attribute an org's counter and its apps' counters to apps and callers without an app (pure)
    org_directory     names, zones and quota scope of orgs
    report_rows       group and sort (pure)
    spend_table, report_formats, focus_export   table, JSON, CSV, FOCUS (pure)
    money, terminal_text   formatting (pure; every command loads terminal_text, so it imports no other module here)
    settings_report   the settings of an org or app as JSON

Imports domain, org_calendar, price_dimensions, config, stores, auth, ledger and budgets. Used by control and cli.
"""
