# Fields that share a line share its comment; Doxygen gives that to the last alone. One line in, one out.
:again
s#((const )?[A-Za-z_:]+ )([^,;()/<]+), ([^;()/<]+); *///< (.*)$#\1\3; /**< \5 */ \1\4; ///< \5#
t again
