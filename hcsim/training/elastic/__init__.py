"""Elastic training: members come and go while training goes on.

ElasticMember       a `Trainer` that `follow` leads from view to view
ReplicatedMember    a member that holds a replica of the model
ServedMember        a worker of a parameter server, as a `Participant`; `ServerReplica` holds the server's state
Votes               how the members of a view commit a step
Provenance, Era     the progress of a model and its views; a `MemberProgress` is the part sent to other members
Parcel              state in transit between members, and as it is saved
Checkpoints         when and where a member saves
Recovery            how long failures keep a member from training, and whether steps are slow
"""
