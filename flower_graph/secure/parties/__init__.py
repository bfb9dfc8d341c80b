"""What is needed besides where the server may lie: SuperNodes with keys of their own, parties."""
