# Rules print in their canonical form.
parse
(Err EIO (And Reads (Offset 0 4096)))
(ENOSPC   Writes)
(Short) (Torn Any) (Flip) (Flip 12 Writes)
(Delay 1500us (Or Syncs (Not (File "seg-*"))))
(Stall Any) (Stall Writes)
(Err ENOSPC (Prob 0.010 42)) (Err EROFS (And Creates (After 3) (Count 1)))
----
(Err EIO (And Reads (Offset 0 4096)))
(Err ENOSPC Writes)
(Short)
(Torn)
(Flip)
(Flip 12 Writes)
(Delay 1.5ms (Or Syncs (Not (File "seg-*"))))
(Stall)
(Stall Writes)
(Err ENOSPC (Prob 0.01 42))
(Err EROFS (And Creates (After 3) (Count 1)))

parse
----

# Errors have the position and the expected words.
parse
Err EIO
----
faultio: at byte 0: Err where a rule is expected: (Err EIO Reads)

parse
(Err)
----
faultio: at byte 0: Err without the name of an error: (Err EIO)

parse
(Err EWHAT Reads)
----
faultio: at byte 5: unknown error EWHAT; want a name of errno(3) such as EIO

parse
(Explode Reads)
----
faultio: at byte 1: unknown action Explode; want Err, ENOSPC, Short, Torn, Flip, Delay or Stall

parse
(Err EIO Reads Writes)
----
faultio: at byte 15: Writes after the predicate of Err; join predicates with (And …) or (Or …)

parse
(Err EIO (And))
----
faultio: at byte 9: And with 0 predicates

parse
(Err EIO (Not Reads Writes))
----
faultio: at byte 9: Not with 2 predicates

parse
(Err EIO (Offset 4096 0))
----
faultio: at byte 9: bytes 4096 to 0 are none; want (Offset FROM TO) with FROM < TO

parse
(Err EIO (Offset 0))
----
faultio: at byte 9: Offset takes 2 numbers, not 1

parse
(Err EIO (After -1))
----
faultio: at byte 16: -1; want a whole number from 0

parse
(Err EIO (Prob 1.5 1))
----
faultio: at byte 15: probability 1.5; want 0 to 1

parse
(Err EIO (Prob 0.5 seed))
----
faultio: at byte 19: seed seed; want a whole number from 0

parse
(Err EIO (File seg))
----
faultio: at byte 9: File takes one quoted pattern: (File "seg-*")

parse
(Err EIO (File "[a"))
----
faultio: at byte 15: pattern "[a": syntax error in pattern

parse
(Delay 2h Reads)
----
faultio: at byte 7: delay 2h; want a duration from 0 to 1h0m0s such as 5ms

parse
(Delay)
----
faultio: at byte 0: Delay without a duration: (Delay 5ms)

parse
(Flip -3)
----
faultio: at byte 6: bit -3; want the number of a bit from the start of the request

parse
(Err EIO "Reads")
----
faultio: at byte 9: unknown predicate "Reads"; want Reads, Writes, Syncs, Creates, Opens, Removes, Any or a list

parse
(Err EIO (File "seg)
----
faultio: at byte 15: a quoted string that does not end, or holds what it may not

parse
(Err EIO
----
faultio: at byte 0: "(" without ")"

parse
)
----
faultio: at byte 0: ")" without "("

parse
(Err EIO (Sometimes))
----
faultio: at byte 10: unknown predicate Sometimes; want File, Offset, After, Count, Prob, And, Or or Not
