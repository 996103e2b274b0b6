"""What tests of several packages share; nothing here is imported by raydz itself."""
