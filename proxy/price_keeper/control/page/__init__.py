"""The status page: its files, its authorization, and the event streams that keep open pages up to date.

Start with `page_endpoints`. `status_board` builds what is shown, `page_state` keeps what is shared by all pages.
May import what control imports.
"""
