"""What tests share: each module is named after what it makes, or what it stands in for."""
