"""Generated protocol code: edit protos/paceline/v1/*.proto and run `make proto`."""
