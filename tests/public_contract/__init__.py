"""What users and other programs rely on, generated from the running product: docs/public-contract.yaml.

`make contract` writes the file; tests/tidy/test_public_contract.py generates it again and compares. It is taken from
outside wherever that can be: from the commands, the answers of both ports, the store's file and the journal's folder.
So names inside the product may change freely, and what is public only where the file says so.
"""
