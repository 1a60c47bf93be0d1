"""The status page: its files, who may see what, and how an open page is kept up to date.

Start with `page_endpoints`. `status_board` builds what is shown, `page_state` keeps what is shared by all pages.
May import what control imports.
"""
