"""What the format deepspeed is made of: its folders, its flat weights, its universal checkpoints."""
