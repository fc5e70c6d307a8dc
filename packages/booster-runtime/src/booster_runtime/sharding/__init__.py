"""What every strategy that splits state over ranks needs: who shares a replica, and what an optimizer lets one cut."""
