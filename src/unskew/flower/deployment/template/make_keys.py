"""Make a certificate for the server, and a key pair for each site; say who gets which file.

python make_keys.py --host fed.example.org --sites clinic_a clinic_b clinic_c
"""

import argparse
from pathlib import Path

from unskew import UnskewError
from unskew.flower import write_all


def main() -> None:
    """Write them into a folder: all of them, or nothing."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--host", nargs="+", required=True, help="names and addresses that sites reach the server by")
    parser.add_argument("--sites", nargs="+", required=True, help="the names of the sites, as in pyproject.toml")
    parser.add_argument("--out", type=Path, default=Path("keys"), help="the folder to write to (keys)")
    told = parser.parse_args()
    try:
        write_all(told.out, told.host, told.sites)
    except UnskewError as error:
        parser.error(str(error))
    print(f"The server alone gets {told.out}/server.key and server.pem, and keeps {told.out}/*.pub.")
    for site in told.sites:
        print(f"{site} gets {told.out}/ca.crt and {told.out}/{site}. Nobody else may have {told.out}/{site}.")
    print("README.md says what to do with them. They are valid for a year.")


if __name__ == "__main__":
    main()
