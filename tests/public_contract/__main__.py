"""`python -m tests.public_contract` writes docs/public-contract.yaml."""

from tests.public_contract.whole import FILE, text

if __name__ == "__main__":
    FILE.write_text(text())
    print(f"written: {FILE}")
