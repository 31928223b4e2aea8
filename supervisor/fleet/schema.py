"""The fleet's tables in PostgreSQL, and how an older schema moves forward.

What a constraint or a trigger here forbids cannot be written by any version of this program, nor by hand.
"""

from __future__ import annotations

from typing import LiteralString

from psycopg import AsyncConnection, Error, errors

from protocol.errors import FleetUnavailable

#: Taken for as long as the schema is made or changed (pg_advisory_xact_lock): the letters "CrSu".
LOCK_KEY = 0x43725375

#: Step N brings the schema from version N to N+1; the number of steps is the current version.
MIGRATIONS: tuple[tuple[LiteralString, ...], ...] = (
    (
        """CREATE TABLE crew_supervisor.replicas(
            replica_id text PRIMARY KEY CHECK (replica_id ~ '^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$'),
            url text NOT NULL CHECK (url ~ '^https?://'),
            instance_id text NOT NULL CHECK (instance_id <> ''),
            journal_epoch bigint NOT NULL CHECK (journal_epoch > 0),
            version text NOT NULL,
            epoch bigint NOT NULL CHECK (epoch > 0),
            request_id text NOT NULL CHECK (request_id <> ''),
            request text NOT NULL,
            lease_s double precision NOT NULL CHECK (lease_s > 0),
            registered_at timestamptz NOT NULL,
            expires_at timestamptz NOT NULL,
            draining boolean NOT NULL DEFAULT false,
            running integer NOT NULL DEFAULT 0 CHECK (running >= 0),
            queued integer NOT NULL DEFAULT 0 CHECK (queued >= 0),
            retired_at timestamptz,
            CONSTRAINT a_retired_replica_has_no_lease CHECK (retired_at IS NULL OR expires_at <= retired_at))""",
        """CREATE TABLE crew_supervisor.actions(
            action_id text PRIMARY KEY CHECK (action_id ~ '^[A-Za-z0-9._:~-]+$' AND length(action_id) <= 256),
            request_hash text NOT NULL CHECK (request_hash ~ '^[0-9a-f]{64}$'),
            crew_id text NOT NULL,
            operation text NOT NULL,
            timeout_ms integer CHECK (timeout_ms > 0),
            replica_id text NOT NULL REFERENCES crew_supervisor.replicas,
            epoch bigint NOT NULL CHECK (epoch > 0),
            admitted_at timestamptz NOT NULL DEFAULT clock_timestamp(),
            status text CHECK (status IN ('completed', 'failed', 'cancelled')),
            uncertain boolean,
            said_by text CHECK (said_by IN ('owner', 'retirement')),
            ended_at timestamptz,
            CONSTRAINT an_ending_is_whole CHECK (
                (status IS NULL) = (ended_at IS NULL) AND (status IS NULL) = (uncertain IS NULL)
                AND (status IS NULL) = (said_by IS NULL)),
            CONSTRAINT what_completed_is_certain CHECK (NOT (status = 'completed' AND uncertain)))""",
        # Served to a retirement, and to a replica that comes back.
        "CREATE INDEX actions_unfinished ON crew_supervisor.actions(replica_id) WHERE status IS NULL",
        """CREATE TABLE crew_supervisor.audit(
            id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY, at timestamptz NOT NULL DEFAULT clock_timestamp(),
            replica_id text NOT NULL REFERENCES crew_supervisor.replicas, act text NOT NULL, actor text NOT NULL,
            evidence text NOT NULL CHECK (evidence <> ''))""",
        """CREATE FUNCTION crew_supervisor.keep_action() RETURNS trigger LANGUAGE plpgsql AS $$
            BEGIN
                IF TG_OP = 'DELETE' THEN
                    RAISE EXCEPTION 'Action % stays a fence', OLD.action_id;
                END IF;
                IF OLD.status IS NOT NULL AND NEW IS DISTINCT FROM OLD THEN
                    RAISE EXCEPTION 'the terminal record of Action % never changes', OLD.action_id;
                END IF;
                IF NEW.action_id <> OLD.action_id OR NEW.request_hash <> OLD.request_hash
                    OR NEW.replica_id <> OLD.replica_id OR NEW.epoch < OLD.epoch THEN
                    RAISE EXCEPTION 'Action % keeps its material, its owner and its epoch', OLD.action_id;
                END IF;
                RETURN NEW;
            END $$""",
        """CREATE TRIGGER keep_action BEFORE UPDATE OR DELETE ON crew_supervisor.actions
            FOR EACH ROW EXECUTE FUNCTION crew_supervisor.keep_action()""",
        """CREATE FUNCTION crew_supervisor.keep_replica() RETURNS trigger LANGUAGE plpgsql AS $$
            BEGIN
                IF TG_OP = 'DELETE' THEN
                    RAISE EXCEPTION 'the id of replica % is never given again', OLD.replica_id;
                END IF;
                IF OLD.retired_at IS NOT NULL AND NEW IS DISTINCT FROM OLD THEN
                    RAISE EXCEPTION 'replica % is retired for ever', OLD.replica_id;
                END IF;
                IF NEW.replica_id <> OLD.replica_id OR NEW.instance_id <> OLD.instance_id
                    OR NEW.epoch < OLD.epoch OR NEW.journal_epoch < OLD.journal_epoch THEN
                    RAISE EXCEPTION 'replica % keeps its journal, and its epochs only grow', OLD.replica_id;
                END IF;
                RETURN NEW;
            END $$""",
        """CREATE TRIGGER keep_replica BEFORE UPDATE OR DELETE ON crew_supervisor.replicas
            FOR EACH ROW EXECUTE FUNCTION crew_supervisor.keep_replica()""",
    ),
    (
        # Times are Unix seconds of whoever wrote them, for people; nothing is decided by them. ``job`` is a row of the
        # journal of ``replica_id``, which made the last claim in its epoch ``replica_epoch``. ``made_from``: the
        # version that this one was made from. ``seq``: the order of the first claims, with gaps.
        """CREATE TABLE crew_supervisor.effects(
            key_id text PRIMARY KEY CHECK (key_id ~ '^[0-9a-f]{64}$'),
            preimage bytea NOT NULL,
            scope text NOT NULL CHECK (scope IN ('crew', 'global')),
            scope_id text NOT NULL,
            tool text NOT NULL,
            policy text NOT NULL CHECK (policy IN ('once', 'provider')),
            args_hash text NOT NULL CHECK (args_hash <> ''),
            state text NOT NULL CHECK (state IN ('claimed', 'settled', 'not_applied', 'unknown', 'abandoned')),
            version bigint NOT NULL CHECK (version > 0),
            epoch bigint NOT NULL CHECK (epoch > 0),
            attempt bigint NOT NULL CHECK (attempt > 0),
            action_id text NOT NULL,
            crew_id text NOT NULL,
            job bigint,
            claimed_at double precision NOT NULL,
            settled_at double precision,
            delivered_at double precision,
            receipt bytea CHECK (octet_length(receipt) <= 65536),
            replays bigint NOT NULL CHECK (replays >= 0),
            reason text NOT NULL,
            actor text NOT NULL,
            decision text NOT NULL CHECK (decision IN ('', 'settled', 'not_applied', 'abandoned')),
            evidence text NOT NULL,
            replica_id text NOT NULL REFERENCES crew_supervisor.replicas,
            replica_epoch bigint NOT NULL CHECK (replica_epoch > 0),
            claim_id text NOT NULL CHECK (claim_id <> ''),
            made_from bigint NOT NULL CHECK (made_from >= 0),
            seq bigint GENERATED ALWAYS AS IDENTITY UNIQUE,
            CONSTRAINT a_key_is_the_digest_of_its_preimage CHECK (sha256(preimage) = decode(key_id, 'hex')),
            CONSTRAINT only_what_is_global_belongs_to_nobody CHECK ((scope = 'global') = (scope_id = '')),
            CONSTRAINT what_is_settled_says_when CHECK ((state = 'settled') = (settled_at IS NOT NULL)),
            CONSTRAINT only_what_is_settled_has_a_receipt CHECK (
                state = 'settled' OR (receipt IS NULL AND delivered_at IS NULL)),
            CONSTRAINT a_version_is_made_from_an_earlier_one CHECK (made_from < version))""",
        # Served to a retirement and to a start.
        "CREATE INDEX effects_claimed ON crew_supervisor.effects(replica_id) WHERE state = 'claimed'",
        "CREATE INDEX effects_unknown ON crew_supervisor.effects(seq) WHERE state = 'unknown'",
        "CREATE INDEX effects_crew ON crew_supervisor.effects(crew_id, seq)",
        """CREATE FUNCTION crew_supervisor.keep_effect() RETURNS trigger LANGUAGE plpgsql AS $$
            BEGIN
                IF TG_OP = 'DELETE' THEN
                    RAISE EXCEPTION 'the effect % blocks or answers for ever', OLD.key_id;
                END IF;
                IF NEW.key_id <> OLD.key_id OR NEW.preimage <> OLD.preimage OR NEW.args_hash <> OLD.args_hash
                    OR NEW.policy <> OLD.policy THEN
                    RAISE EXCEPTION 'the effect % keeps its key, its arguments and its policy', OLD.key_id;
                END IF;
                IF NEW.version <= OLD.version OR NEW.attempt < OLD.attempt OR NEW.replays < OLD.replays THEN
                    RAISE EXCEPTION 'the effect % only goes forward', OLD.key_id;
                END IF;
                IF NEW.attempt > OLD.attempt THEN
                    IF OLD.state NOT IN ('not_applied', 'unknown') THEN
                        RAISE EXCEPTION 'the effect % is % and cannot be claimed', OLD.key_id, OLD.state;
                    END IF;
                ELSIF NEW.replica_id <> OLD.replica_id OR NEW.claim_id <> OLD.claim_id THEN
                    RAISE EXCEPTION 'the claim of the effect % has one holder', OLD.key_id;
                ELSIF NEW.state <> OLD.state AND (OLD.state, NEW.state) NOT IN (
                    ('claimed', 'settled'), ('claimed', 'not_applied'), ('claimed', 'unknown'),
                    ('unknown', 'settled'), ('unknown', 'not_applied'), ('unknown', 'abandoned')) THEN
                    RAISE EXCEPTION 'the effect % cannot become % from %', OLD.key_id, NEW.state, OLD.state;
                END IF;
                RETURN NEW;
            END $$""",
        """CREATE TRIGGER keep_effect BEFORE UPDATE OR DELETE ON crew_supervisor.effects
            FOR EACH ROW EXECUTE FUNCTION crew_supervisor.keep_effect()""",
    ),
)
VERSION = len(MIGRATIONS)


async def make_schema(dsn: str) -> int:
    """Make the schema, or bring it forward. Returns the version that was there. Raises FleetUnavailable."""
    try:
        connection = await AsyncConnection.connect(
            dsn, autocommit=True, connect_timeout=10, target_session_attrs="read-write"
        )
        async with connection:
            return await ensure(connection)
    except Error as error:
        text = str(error).strip().partition("\n")[0]
        raise FleetUnavailable(f"the fleet's tables were not made: {text}; correct that and run it again") from None


async def version_of(connection: AsyncConnection) -> int:
    """The version of the schema that is there, 0 for none. Raises psycopg.Error."""
    try:
        found = await (await connection.execute("SELECT max(version) FROM crew_supervisor.schema")).fetchone()
    except (errors.UndefinedTable, errors.InvalidSchemaName):
        return 0
    return int(found[0] or 0) if found else 0


async def ensure(connection: AsyncConnection) -> int:
    """Make the schema, or bring it forward, one process at a time. Returns the version that was there before.

    Raises FleetUnavailable for a newer schema and where the role may not make it, psycopg.Error.
    """
    found = await version_of(connection)
    if found == VERSION:
        return found
    try:
        async with connection.transaction():
            await connection.execute("SELECT pg_advisory_xact_lock(%s)", (LOCK_KEY,))
            await connection.execute("CREATE SCHEMA IF NOT EXISTS crew_supervisor")
            await connection.execute(
                """CREATE TABLE IF NOT EXISTS crew_supervisor.schema(
                    version integer PRIMARY KEY CHECK (version > 0),
                    at timestamptz NOT NULL DEFAULT clock_timestamp())"""
            )
            found = await version_of(connection)
            for version, step in enumerate(MIGRATIONS[found:], found + 1):
                for statement in step:
                    await connection.execute(statement)
                await connection.execute("INSERT INTO crew_supervisor.schema(version) VALUES(%s)", (version,))
    except errors.InsufficientPrivilege:
        raise FleetUnavailable(
            f"the fleet's schema has version {found}, this program needs {VERSION}, and its role may not make it; run"
            " `crew-supervisor fleet init` as a role that may create schemas"
        ) from None
    if found > VERSION:
        raise FleetUnavailable(
            f"the fleet's schema has version {found}, this program knows {VERSION}; start the newer version"
        )
    return found
