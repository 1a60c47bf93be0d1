"""What was spent, read from the counters in the store: by org, app, label and day.

    spend_report      build a report. START HERE.
    report_period     the days that it covers (pure)
    attribution       an org's counter and its apps' counters to who spent what (pure)
    org_directory     names, zones and quota scope of orgs
    report_rows       group and sort (pure)
    spend_table, report_formats, focus_export   table, JSON, CSV, FOCUS (pure)
    money, terminal_text   formatting (pure; terminal_text is loaded by every command, so it imports nothing of ours)
    settings_report   the settings of an org or app as JSON

Imports domain, org_calendar, config, stores, ledger and budgets. Used by control and cli.
"""
