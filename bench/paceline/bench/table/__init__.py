"""Speed of Paceline's drafters beside other engines, by category of prompts."""
